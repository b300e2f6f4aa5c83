"""Workers know no algorithm: they see the columns they read and return the columns they write."""
