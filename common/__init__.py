"""What every notebook imports: NumPy and the standard library only, Python 3.8 and later.

`workloads` holds the specifications, `data` the data sets, `identity` the proof that two
implementations compute the same thing, `trial` the record of one executed notebook, and
`machine` what can be learnt about the computer.
"""
