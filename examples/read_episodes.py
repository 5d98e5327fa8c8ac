"""Reads the episodes that a run recorded: `python -m examples.read_episodes runs/demo/episodes/after.jsonl`.

Prints how many episodes of each task family were solved and how they ended, then the conversation of the first failure.
"""

import sys
from collections import Counter, defaultdict
from pathlib import Path

from composer_jax import read_episodes


def main(path: str) -> None:
    episodes = read_episodes(Path(path))
    by_family = defaultdict(list)
    for episode in episodes:
        by_family[episode.family].append(episode)
    for family, attempts in sorted(by_family.items()):
        graded = [episode for episode in attempts if episode.reward is not None]  # None: the infrastructure failed
        solved = sum(episode.reward == 1.0 for episode in graded)
        ends = ", ".join(f"{n} {outcome}" for outcome, n in Counter(e.outcome for e in attempts).most_common())
        summaries = sum(episode.summaries for episode in attempts) / len(attempts)
        print(f"{family}: {solved} of {len(graded)} solved; {ends}; {summaries:.1f} summaries each")

    failure = next((episode for episode in episodes if episode.reward == 0.0), None)
    if failure is None:
        return
    print(f"\n{failure.task_id}, seed {failure.seed}: {failure.parts.get('detail', failure.outcome)}")
    for number, segment in enumerate(failure.segments):
        print(f"--- segment {number}")
        for message in segment:
            calls = "".join(f" {call.name}({call.arguments})" for call in message.calls)
            print(f"[{message.kind}, {message.tokens} tokens] {message.text}{calls}")


if __name__ == "__main__":
    main(*sys.argv[1:])
