"""apex.amp's levels of mixed precision: see train.py."""
