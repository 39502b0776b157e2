"""Recipes: what FlexLab knows about models and engines, as checked data."""
