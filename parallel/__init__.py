"""Runs of several processes, on one machine or many; imported where torchrun has started more than one."""

from parallel.group import Group, join

__all__ = ["Group", "join"]
