"""Document lengths -> StepPlan: which ranks hold which document, when. No torch."""
