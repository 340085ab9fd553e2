"""Reinforcement learning of language models on PyTorch Lightning."""
