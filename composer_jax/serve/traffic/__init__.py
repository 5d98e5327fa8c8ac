"""Production traffic on disk: what users who consent see of the served model, and what became of it.

records.py says what a session, a turn and an event are; realtime/ reads them.
"""
