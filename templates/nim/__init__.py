"""Nim with one heap against a scripted opponent."""
