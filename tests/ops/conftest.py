"""Stands here so that the tests of every family can import this folder's `cases`."""
