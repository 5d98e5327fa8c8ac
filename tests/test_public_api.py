"""`import composer_jax` is cheap, and every public name resolves."""

import subprocess
import sys

import pytest

import composer_jax

NOTEBOOK = {
    *("Task", "Episode", "Transcript", "run_attempt", "Sampler", "Learner", "SandboxPool", "LocalSandboxPool"),
    *("Run", "pretrain", "sft", "train_rl", "evaluate", "report", "pipeline", "load_hf", "load_model", "save_hf"),
    *("Model", "ModelConfig", "ModelDef", "Tokenizer", "UserError", "read_episodes", "read_metrics"),
}


def test_a_notebook_finds_what_it_needs():
    assert NOTEBOOK <= set(composer_jax.__all__)
    assert composer_jax.__all__ == sorted(set(composer_jax.__all__)) == dir(composer_jax)


@pytest.mark.parametrize("name", composer_jax.__all__)
def test_every_public_name_resolves(name):
    public = getattr(composer_jax, name)
    assert callable(public) and public.__name__ == name
    assert public.__module__.startswith("composer_jax.") and public.__doc__


def test_an_unknown_name_is_refused_with_the_names_that_exist():
    with pytest.raises(AttributeError, match="no 'Runner'; it has Episode, .*Run, "):
        getattr(composer_jax, "Runner")  # noqa: B009
    with pytest.raises(AttributeError, match="composer_jax.reinforce is now composer_jax.train_rl"):
        getattr(composer_jax, "reinforce")  # noqa: B009
    with pytest.raises(AttributeError, match="composer_jax.run_episode is now composer_jax.run_attempt"):
        getattr(composer_jax, "run_episode")  # noqa: B009


def test_importing_the_package_loads_neither_jax_nor_its_own_modules():
    script = (
        "import sys, composer_jax\n"
        "roots = ('jax.', 'numpy.', 'composer_jax.')\n"
        "print([name for name in sys.modules if f'{name}.'.startswith(roots) and name != 'composer_jax'])"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
