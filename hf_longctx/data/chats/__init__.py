"""Conversations: templates, and which tokens an assistant wrote."""
