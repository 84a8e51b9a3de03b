"""What was asked for: frozen dataclasses, the only home of defaults. Flags are derived from their fields.

What was found out (free memory, block counts) is of other types, in the rooms that find it out.
"""
