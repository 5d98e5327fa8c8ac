"""Groups of the training tasks that an update from traffic plays beside its sessions, with the anchor's weights."""

from collections.abc import Sequence

from composer_jax.errors import UserError
from composer_jax.observe.progress import Progress
from composer_jax.rl.group_source import GroupSource
from composer_jax.rl.ledger import RolloutLedger
from composer_jax.rl.played_group import PlayedGroup
from composer_jax.rl.rollout import require_graded, roll_out
from composer_jax.sampler.sampler import Sampler
from composer_jax.stages.run import Run


def reserve_groups(run: Run, ledger: RolloutLedger, step: int, count: int) -> tuple[GroupSource, list[int]]:
    """Returns the source of the run's groups and the numbers of `count` of them that no step has learned from.

    Groups that a killed attempt, or one that learned nothing, has admitted come first; a task is in one group only.

    step: RL steps that had been taken when the update began, which tells its groups from those of all others.

    Raises:
      UserError: a family of tasks from disk has no task left, or tasks.train holds others than when RL began.
    """
    run.services.check_task_manifest(step)
    source = GroupSource(run.config.rl, run.config.agent, run.config.seed, run.services.tasks)
    source.restore(ledger.places)
    numbers = sorted(number for number, admitted_at in ledger.admitted.items() if admitted_at == step)
    results = [record.families for record in ledger.batches]
    while len(numbers) < count:
        number = len(ledger.admitted)
        place = source.draw(number, results)
        if not run.services.tasks.has_task(*place):
            raise UserError(
                f"all {place[1]} tasks of {place[0]} in tasks.train are used; set rl.groups.{place[0]}=0 in a new run, "
                "or go on with --config.traffic.simulated_fraction=0."
            )
        ledger.admit(number, step, place)
        numbers.append(number)
    return source, numbers[:count]


def play_simulated(
    run: Run, ledger: RolloutLedger, source: GroupSource, waves: Sequence[Sequence[int]], sampler: Sampler
) -> None:
    """Plays the groups that are not stored, and stores them.

    The groups of a wave play at once, from an empty cache, and are stored when all have ended. A wave that was cut
    short is played again as a whole: what another one had left in the cache would change the last bits of its
    log-probabilities.

    Raises:
      UserError: the infrastructure lost all episodes of a wave.
    """
    missing = [wave for wave in waves if not all(map(ledger.has, wave))]
    if not missing:
        return
    size, replays = run.config.rl.group_size, run.config.rl.route_shape(run.config.model) is not None
    version, episodes_in_all = sampler.version, size * sum(map(len, missing))
    with (
        run.services.episode_context(return_routing=replays) as (context, loop),
        Progress(episodes_in_all, "episode", "simulated groups") as progress,
    ):
        workers = run.services.rollout_workers(context)
        for wave in missing:
            sampler.reset_prefix_cache()
            specs = [spec for number in wave for spec in source.specs(number)]
            played = roll_out(specs, sampler, context, lambda _: progress.update(1), workers.play)
            episodes = loop.run(workers.serve(played))
            require_graded(episodes)
            for i, number in enumerate(wave):
                group = episodes[i * size : (i + 1) * size]
                ledger.store(PlayedGroup(number, group, ledger.admitted[number], version))
