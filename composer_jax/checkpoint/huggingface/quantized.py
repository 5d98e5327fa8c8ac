"""Reads the quantised formats of published mixtures of experts as floats.

fp8    DeepSeek-V3: w = q * scale_inv of its block of 128 x 128 weights; q in float8 e4m3
int4   Kimi K2.5 (compressed-tensors, pack-quantized): w = q * scale of its group of 32 weights along the input;
       q in -8 .. 7, stored as q + 8, eight to an int32, the first in the lowest bits
mxfp4  gpt-oss (OCP Microscaling Formats 1.0): w = q * 2^(scale - 127) of its group of 32 weights along the input;
       q in float4 e2m1, two to a byte, the first in the lower half; matrices are [out, in] here, [in, out] as floats

Scales of fp8 and mxfp4 may be stored as powers of two (F8_E8M0).
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from composer_jax.checkpoint.huggingface.safetensors_files import DTYPES, SafetensorsFolder, TensorSpan
from composer_jax.errors import UserError

_PER_WORD = 8  # 4-bit values in an int32
_FLOATS = ("F64", "F32", "F16", "BF16")
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def dequantize_fp8(q: np.ndarray, scale_inv: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """Returns float32 [O,I] from float8 [O,I] and one float32 scale per block, [ceil(O/block), ceil(I/block)]."""
    scale = scale_inv.astype(np.float32).repeat(block[0], 0)[: q.shape[0]].repeat(block[1], 1)[:, : q.shape[1]]
    return q.astype(np.float32) * scale


def dequantize_int4(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Returns float32 [O,I] from int32 [O,I/8] and scales [O,I/group]."""
    shifts = np.arange(0, 32, 4, dtype=np.uint32)
    q = ((packed.view(np.uint32)[:, :, None] >> shifts) & 15).astype(np.int8) - 8
    rows, groups = scale.shape
    return (q.reshape(rows, groups, -1) * scale.astype(np.float32)[:, :, None]).reshape(rows, -1)


def dequantize_mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Returns float32 [E,I,O] from uint8 [E,O,I/32,16] and exponents of one byte [E,O,I/32]."""
    q = np.empty((*blocks.shape, 2), np.float32)  # filled and scaled in place, because it can be gigabytes
    q[..., 0], q[..., 1] = _E2M1[blocks & 15], _E2M1[blocks >> 4]
    values = q.reshape(*blocks.shape[:3], 32)
    np.ldexp(values, scales.view(np.uint8).astype(np.int32)[..., None] - 127, out=values)
    return values.reshape(*blocks.shape[:2], -1).transpose(0, 2, 1)


class CheckpointFiles:
    """The tensors of a checkpoint by the name and shape of the weight; quantised ones are read as float32.

    Args:
      files: the safetensors files.
      quantization: quantization_config of config.json, or None.
      prefix: prefix of the names of the language model (K2.5: "language_model."); other tensors are left out.
      excluded: prefixes, after `prefix`, of further names to leave out.

    Raises:
      UserError: an unsupported quantisation, or a quantised tensor without its scale.
    """

    def __init__(
        self,
        files: SafetensorsFolder,
        quantization: Mapping[str, Any] | None,
        prefix: str = "",
        excluded: tuple[str, ...] = (),
    ):
        self._files, self._prefix = files, prefix
        if not isinstance(quantization, Mapping | None):
            raise UserError(f"quantization_config is {quantization!r}, which is not an object.")
        self._block = _fp8_block(quantization)
        self._group = _int4_group(quantization)
        stored = {
            name.removeprefix(prefix): tensor
            for name, tensor in files.tensors.items()
            if name.startswith(prefix) and not name.removeprefix(prefix).startswith(excluded)
        }
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.sizes: dict[str, int] = {}
        """Bytes in the files, by name."""
        for name, tensor in stored.items():
            if name.endswith((".weight_scale", ".weight_shape", ".weight_scale_inv", "_scales")):
                continue
            plain, shape = name, tensor.shape
            if name.endswith(".weight_packed"):
                plain = name.removesuffix("_packed")
                self._require_int4(plain, stored)
                shape = (shape[0], shape[1] * _PER_WORD)
            elif name.endswith("_blocks"):
                plain = name.removesuffix("_blocks")
                self._require_mxfp4(plain, stored)
                shape = (shape[0], 32 * shape[2], shape[1])
            elif tensor.dtype == "F8_E4M3":
                self._require_fp8(name, stored)
            elif tensor.dtype not in _FLOATS:
                raise UserError(f"{name} is {tensor.dtype}; floats, fp8 in blocks, packed int4 and mxfp4 can be read.")
            self.shapes[plain], self.sizes[plain] = shape, tensor.size

    def read(self, name: str) -> np.ndarray:
        full = self._prefix + name
        if f"{full}_packed" in self._files.tensors:
            return dequantize_int4(self._files.read(f"{full}_packed"), self._files.read(f"{full}_scale"))
        if f"{full}_blocks" in self._files.tensors:
            return dequantize_mxfp4(self._files.read(f"{full}_blocks"), self._files.read(f"{full}_scales"))
        array = self._files.read(full)
        if array.dtype == DTYPES["F8_E4M3"] and self._block is not None:  # checked by the constructor
            return dequantize_fp8(array, self._files.read(f"{full}_scale_inv"), self._block)
        return array

    def _require_fp8(self, name: str, stored: Mapping[str, TensorSpan]) -> None:
        if self._block is None:
            raise UserError(f"{name} is F8_E4M3, but config.json has no quantization_config with weight_block_size.")
        shape = stored[name].shape
        if len(shape) != 2:
            raise UserError(f"{name} is fp8 of shape {list(shape)}; only matrices can be read.")
        expected = tuple(-(-size // block) for size, block in zip(shape, self._block, strict=True))
        scale = stored.get(f"{name}_scale_inv")
        if scale is None or scale.shape != expected:
            raise UserError(f"{name}_scale_inv {_describe(scale)}; {list(expected)} belongs to {list(shape)} in fp8.")
        _require_dtype(f"{name}_scale_inv", scale, (*_FLOATS, "F8_E8M0"))

    def _require_int4(self, name: str, stored: Mapping[str, TensorSpan]) -> None:
        if self._group is None:
            raise UserError(f"{name}_packed has no quantization_config in config.json, which says how it is quantised.")
        packed = stored[f"{name}_packed"]
        if len(packed.shape) != 2 or packed.dtype != "I32":
            raise UserError(f"{name}_packed is {packed.dtype}{list(packed.shape)}; matrices of I32 can be read.")
        rows, words = packed.shape
        expected = (rows, words * _PER_WORD // self._group)
        scale = stored.get(f"{name}_scale")
        if scale is None or scale.shape != expected or words * _PER_WORD % self._group:
            raise UserError(
                f"{name}_scale {_describe(scale)}; {list(expected)} belongs to groups of {self._group} of "
                f"{words * _PER_WORD}."
            )
        _require_dtype(f"{name}_scale", scale, _FLOATS)

    def _require_mxfp4(self, name: str, stored: Mapping[str, TensorSpan]) -> None:
        blocks, scale = stored[f"{name}_blocks"], stored.get(f"{name}_scales")
        shape = blocks.shape
        _require_dtype(f"{name}_blocks", blocks, ("U8",))
        if len(shape) != 4 or shape[3] != 16 or scale is None or scale.shape != shape[:3]:
            raise UserError(
                f"{name}_blocks is {list(shape)}, {name}_scales {_describe(scale)}; [E,O,G,16] and [E,O,G] are needed."
            )
        _require_dtype(f"{name}_scales", scale, ("U8", "F8_E8M0"))


def _require_dtype(name: str, tensor: TensorSpan, dtypes: tuple[str, ...]) -> None:
    if tensor.dtype not in dtypes:
        raise UserError(f"{name} is {tensor.dtype}; {' or '.join(dtypes)} can be read.")


def _describe(scale: TensorSpan | None) -> str:
    """Returns "is missing" or "is SHAPE", for errors."""
    return "is missing" if scale is None else f"is {list(scale.shape)}"


def _fp8_block(quantization: Mapping[str, Any] | None) -> tuple[int, int] | None:
    if not quantization or quantization.get("quant_method") != "fp8":
        return None
    block = quantization.get("weight_block_size")
    if not isinstance(block, list | tuple) or len(block) != 2 or not all(isinstance(n, int) and n > 0 for n in block):
        raise UserError(
            f"quantization_config has weight_block_size={block!r}; only two-dimensional blocks can be read."
        )
    return block[0], block[1]


def _int4_group(quantization: Mapping[str, Any] | None) -> int | None:
    if not quantization or quantization.get("quant_method") in ("fp8", "mxfp4"):
        return None
    method, form = quantization.get("quant_method"), quantization.get("format")
    if (method, form) != ("compressed-tensors", "pack-quantized"):
        raise UserError(
            f"quantization_config has quant_method={method!r}, format={form!r}; fp8 in blocks, mxfp4 "
            "and compressed-tensors pack-quantized can be read."
        )
    groups = quantization.get("config_groups") or {}
    if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
        raise UserError(f"quantization_config has config_groups={groups!r}, which is not an object of objects.")
    sections = [group.get("weights") or {} for group in groups.values()]
    supported = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
    for weights in sections:
        for key, value in supported.items():
            if weights.get(key) != value:
                raise UserError(f"quantization_config has {key}={weights.get(key)!r}; only {value!r} is supported.")
    sizes = {weights.get("group_size") for weights in sections}
    if len(sizes) != 1 or not isinstance(size := next(iter(sizes)), int):
        raise UserError(f"quantization_config has group sizes {sorted(map(str, sizes))}; one number is needed.")
    return size
