"""Measuring attention: named cases, implementations side by side, tables and plots, as `onchip bench` does."""
