"""A program that prints the order number in a customer's message, its first argument.

Nothing in this file is for training. It reads URL and key where OpenAI's SDKs do, and could be written in any language.
"""

import json
import os
import sys
import urllib.request

PROMPT = [
    {"role": "system", "content": "Reply with the order number."},
    {"role": "user", "content": "My lamp from order 4410 came broken on 3 May."},
    {"role": "assistant", "content": "4410"},
    {"role": "user", "content": "I paid 89 euros for order 2047. Where is it?"},
    {"role": "assistant", "content": "2047"},
    {"role": "user", "content": "Please cancel 1182, invoice 9034."},
    {"role": "assistant", "content": "1182"},
]

url = os.environ.get("OPENAI_BASE_URL", "https://api.openai.com/v1")
headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
body = {"model": "gpt-4o-mini", "messages": [*PROMPT, {"role": "user", "content": sys.argv[1]}]}
request = urllib.request.Request(f"{url}/chat/completions", json.dumps(body).encode(), headers)
with urllib.request.urlopen(request) as response:
    print(json.load(response)["choices"][0]["message"]["content"])
