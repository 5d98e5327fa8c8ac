"""The texts around a self-summary; a config replaces them by agent.compactions.NAME.request and .carry."""

REQUEST = (
    "The context is nearly full. Write a summary from which you can continue without it: the goal, the files you "
    "changed and how, the facts and paths you still need, what failed, and the next step."
)
"""The user message that asks for a summary (not published)."""

SUMMARY = "{summary}"
"""Stands for the summary in CARRY, which also may have {number}, the count of summaries, and {plan}, the plan below its
heading or nothing."""

CARRY = f"Summary {{number}}:\n{SUMMARY}{{plan}}"
"""The user message that a new branch starts with (not published)."""

PLAN = "\nPlan:\n"
"""The heading of the plan (not published)."""
