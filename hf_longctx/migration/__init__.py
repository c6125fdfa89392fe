"""Configurations of axolotl, LLaMA-Factory and TRL -> ours: every key is translated, needless here, or without counterpart.

    rules.py            kinds of rules, and going through a configuration with them
    axolotl.py, llama_factory.py, trl.py     what each key of theirs becomes, after the releases that are named there

No file but theirs is read, and nothing of theirs is run.
"""
