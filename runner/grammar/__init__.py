"""Grammars: what the tokens of a model spell, compiled automata, and the ids that each lets come next."""
