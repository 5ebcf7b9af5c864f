"""`onchip demo`: real text through a pretrained encoder, a small training run, and a report of what it cost.

run.py      the whole demo
embed.py    a sentence encoder with its stock attention and with onchip
train.py    a byte-level transformer with dense attention and with onchip
scaling.py  time and memory of one call against the sequence length
report.py   results -> report.html
"""
