"""Launchers of runs, and forecasts of them: dry runs, traces, health of machines."""
