"""What EAGLE and EAGLE-3 share: a chain of draft rows, each made of a feature and the token behind it.

    row i = (feature i, token i + 1), at position i  ->  hidden i  ->  law of token i + 2

Features come from the target up to the row before the anchor; from there on each row's own output is the feature of the
next (methods, 3.2, 3.3 and 5.2). `network` is what a drafter's network is to the rest, `decode` the drafting, `unroll`
the same chain in training, `start` the weights it begins with.
"""
