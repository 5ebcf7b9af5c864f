"""Adapters that let other libraries call onchip. Each one imports its library only when it is used."""
