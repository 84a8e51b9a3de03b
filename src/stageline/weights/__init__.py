"""Reads the weights of one stage, and only those: dequantises, checks shapes, says what is wrong with which file."""
