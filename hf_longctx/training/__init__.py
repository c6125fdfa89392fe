"""Runs StepPlans: loss, gradient reduction, the Trainer mixin and the Accelerate plugin."""
