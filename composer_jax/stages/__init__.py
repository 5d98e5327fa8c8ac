"""The stages of the pipeline: pretrain, sft, train_rl, evaluate, report, and pipeline for all of them.

They share Run: its folder and devices (run.py), network and weights (run_model.py), source code and tokenizer
(run_data.py), and what episodes need (rollout_services.py).
"""
