"""Runs a Layout: attention across ranks. Layouts and schedules come from `hf_longctx.layouts.layout`."""
