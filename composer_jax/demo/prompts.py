"""The demo's requests for a summary. A model of a million parameters reads short ones only."""

from typing import Literal

Style = Literal["short", "long", "some"]
REQUESTS: dict[Style, str] = {
    "short": "Summarize.",
    # The baseline: the kind of report that a model without training in summaries is asked for.
    "long": "Write a report: Goal, Facts, Next.",
    # The expert keeps any number of facts, so that RL can choose how many are worth their tokens.
    "some": "List what matters.",
}
