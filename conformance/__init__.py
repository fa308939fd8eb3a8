"""Does a server speak OpenAI's API exactly? Named checks through the official client and through raw sockets.

python -m conformance                                    Quire with its embedded model, started for it
python -m conformance --url http://host:8000 --api-key KEY --model NAME      any other server
python -m conformance --clients                          and the clients that people use (clients/)
"""
