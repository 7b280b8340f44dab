"""What the verbs print: results, notes, help, and the progress of a receive."""
