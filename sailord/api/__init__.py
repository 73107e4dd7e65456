"""The HTTP interface: what people and programs ask of sailord, and what others tell it."""
