"""Conversations: templates, and the tokens that an assistant wrote."""
