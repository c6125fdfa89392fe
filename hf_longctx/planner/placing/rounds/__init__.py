"""Rounds of mode "lockstep": filled one after the other, or dealt out several at once."""
