"""Measurements: ratios against something in the same run, since figures of one machine say little about another."""
