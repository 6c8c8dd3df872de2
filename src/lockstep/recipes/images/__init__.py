"""Classifiers of images in class folders."""
