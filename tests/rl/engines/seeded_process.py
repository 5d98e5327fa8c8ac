"""An engine of seeded_engine.py in a process, with the flags and the line of launch.serve.

python -m tests.rl.engines.seeded_process --token_file=FILE --pause_s=SECONDS
"""

import asyncio
import sys
from pathlib import Path

from composer_jax.rl.engines.engine_process import LEARNERS_AT
from tests.rl.engines.seeded_engine import Engine, EngineSession


class SlowSession(EngineSession):
    async def sample(self, context, params, branch=0):
        await asyncio.sleep(self.policy.pause_s)
        return await super().sample(context, params, branch)


class SlowEngine(Engine):
    async def open(self, seed, *, ahead=False):
        await super().open(seed, ahead=ahead)
        return SlowSession(self, seed)


async def main():
    flags = dict(flag.split("=", 1) for flag in sys.argv[1:])
    engine = SlowEngine()
    engine.pause_s = float(flags["--pause_s"])
    token = Path(flags["--token_file"]).read_text()
    async with engine.serving(), engine.listening(token=token):
        print(f"listens{LEARNERS_AT}127.0.0.1:{engine.port}", file=sys.stderr, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
