"""The rank map that a launcher gives: see train.py."""
