"""A model's weights from one machine to another: only what a stage needs, piece by piece, checked and kept."""
