"""Evaluation of a frozen model by its features: linear classifiers and nearest neighbours."""

from vitpar.training.probe.classifier import write_classifier
from vitpar.training.probe.linear import RATES, LinearProbe, Probed, train_classifiers
from vitpar.training.probe.neighbours import NEIGHBOURS, TEMPERATURE, nearest_neighbours
from vitpar.training.probe.read import Features, read_features

__all__ = [
    "NEIGHBOURS",
    "RATES",
    "TEMPERATURE",
    "Features",
    "LinearProbe",
    "Probed",
    "nearest_neighbours",
    "read_features",
    "train_classifiers",
    "write_classifier",
]
