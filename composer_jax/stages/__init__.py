"""The stages of the pipeline: pretrain, sft, reinforce, evaluate, report, and pipeline for all of them.

They share the schema of all configs (config.py) and Run: its folder and devices (run.py), network and weights
(run_model.py), source code and tokenizer (run_data.py), and what episodes need (rollout_services.py).
"""
