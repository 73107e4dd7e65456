"""Is a better plan worth the move to it?"""
