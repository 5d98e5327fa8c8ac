"""Archives from a container: unpacking one changes nothing outside its folder."""

import io
import tarfile

import pytest

from composer_jax.sandbox import SandboxFileError
from composer_jax.sandbox.container_changes import unpack_into


def archive(*entries, end=True):
    """(name, kind, target or content) each."""
    with tarfile.open(fileobj=(packed := io.BytesIO()), mode="w") as tar:
        for name, kind, what in entries:
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = kind, 0o644
            if kind == tarfile.REGTYPE:
                entry.size = len(what)
            else:
                entry.linkname = what
            tar.addfile(entry, io.BytesIO(what) if kind == tarfile.REGTYPE else None)
    packed.seek(0)
    return packed


FILE, HARD, SOFT, FOLDER, PIPE = tarfile.REGTYPE, tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE


@pytest.fixture
def places(tmp_path):
    (tmp_path / "inside").mkdir()
    secret = tmp_path / "secret"
    secret.write_text("secret")
    secret.chmod(0o400)
    return tmp_path / "inside", secret


@pytest.mark.parametrize("to", ["{secret}", "../secret", "./../secret"])
def test_a_hard_link_to_the_host_is_nothing(places, to):
    inside, secret = places
    to = to.format(secret=secret)
    with pytest.raises(SandboxFileError):
        unpack_into(archive(("a", HARD, to), ("a", FILE, b"gotcha")), inside, 1 << 20)
    assert secret.read_text() == "secret" and secret.stat().st_mode & 0o777 == 0o400 and list(inside.iterdir()) == []


@pytest.mark.parametrize("name", ["../x", "/tmp/x", "a/../../x", "link/x"])
def test_a_name_that_leads_out_is_refused(places, name):
    inside, secret = places
    with pytest.raises(SandboxFileError, match="cannot be fetched"):
        unpack_into(archive(("link", SOFT, ".."), (name, FILE, b"gotcha")), inside, 1 << 20)
    assert sorted(path.name for path in inside.parent.iterdir()) == ["inside", "secret"]


def test_a_file_in_place_of_a_link_replaces_the_link(places):
    inside, secret = places
    unpack_into(archive(("a", SOFT, str(secret)), ("a", FILE, b"mine")), inside, 1 << 20)
    assert (inside / "a").read_bytes() == b"mine" and not (inside / "a").is_symlink()
    assert secret.read_text() == "secret"


def test_two_names_of_a_file_are_two_files_and_what_is_special_is_left_out(places):
    inside, _ = places
    entries = ("d", FOLDER, ""), ("d/one", FILE, b"x"), ("two", HARD, "d/one"), ("pipe", PIPE, ""), ("./", FOLDER, "")
    unpack_into(archive(*entries), inside, 1 << 20)
    assert sorted(str(path.relative_to(inside)) for path in inside.rglob("*")) == ["d", "d/one", "two"]
    assert (inside / "two").read_bytes() == b"x" and (inside / "two").stat().st_nlink == 1


@pytest.mark.parametrize(
    "packed",
    [
        io.BytesIO(b"no archive at all" * 100),
        archive(("x" * 300, FILE, b"")),
        archive(("a", FILE, b"x" * 600), ("b", FILE, b"x" * 600)),
        archive(*((f"{'d/' * 70}f", FILE, b"x"),)),
    ],
    ids=["garbage", "long_name", "too_much", "too_deep"],
)
def test_an_archive_that_cannot_be_unpacked_raises_with_a_reason(places, packed):
    with pytest.raises(SandboxFileError):
        unpack_into(packed, places[0], 1000)


def test_compressed_archives_are_not_unpacked(places):
    with tarfile.open(fileobj=(packed := io.BytesIO()), mode="w:gz") as tar:
        tar.addfile(tarfile.TarInfo("a"))
    packed.seek(0)
    with pytest.raises(SandboxFileError, match="no archive that can be unpacked"):
        unpack_into(packed, places[0], 1000)
