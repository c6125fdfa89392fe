"""Worlds that tests run in: ranks, forked processes and programs, and clocks, memory and GPUs that are not there."""
