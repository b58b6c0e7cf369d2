"""Races of language models: their models, their committed settings, and plans that are run in pieces which add up."""
