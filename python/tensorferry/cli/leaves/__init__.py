"""What a checkpoint holds, leaf by leaf: listed, digested and compared, without torch where that is possible."""
