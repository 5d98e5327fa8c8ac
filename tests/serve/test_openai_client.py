"""OpenAI's own client, synchronous, asynchronous and streaming, against a real server."""

import asyncio
import json

import openai
import pytest

from composer_jax.data.chat.messages import ToolCall

ASK = [{"role": "user", "content": "What is in a.py?"}]
READ = {
    "type": "function",
    "function": {
        "name": "read",
        "description": "Reads a file",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
    },
}
CALLS = [ToolCall("read", {"path": "a.py"}), ToolCall("read", {"path": "b.py"})]


def client_of(url, key="none"):
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


def test_a_chat_is_the_same_at_once_in_pieces_and_asynchronously(network_url, text, sampler):
    client = client_of(network_url)
    options = dict(model="small", messages=ASK, max_tokens=24, seed=5, logprobs=True)
    extra = {"return_token_ids": True}
    whole = client.chat.completions.create(**options, extra_body=extra)
    choice = whole.choices[0]
    assert whole.prompt_token_ids == text.encode_chat(ASK)
    assert whole.usage.prompt_tokens == len(whole.prompt_token_ids)
    assert whole.usage.completion_tokens == len(choice.token_ids) == len(choice.logprobs.content)
    assert choice.weight_versions == [sampler.version] * len(choice.token_ids)
    assert all(row.logprob <= 0 for row in choice.logprobs.content)
    chunks = list(
        client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}, extra_body=extra)
    )
    assert chunks[0].prompt_token_ids == whole.prompt_token_ids and chunks[0].choices[0].delta.role == "assistant"
    deltas = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(delta.delta.content or "" for delta in deltas) == choice.message.content
    assert [i for delta in deltas for i in getattr(delta, "token_ids", None) or []] == choice.token_ids
    logprobs = [row.logprob for delta in deltas if delta.logprobs for row in delta.logprobs.content]
    assert logprobs == [row.logprob for row in choice.logprobs.content]
    assert deltas[-1].finish_reason == choice.finish_reason == "length"
    assert len([delta for delta in deltas if getattr(delta, "token_ids", None)]) > 2, "in pieces"
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 0

    async def ask():
        async with openai.AsyncOpenAI(base_url=f"{network_url}/v1", api_key="none") as other:
            return await asyncio.gather(*(other.chat.completions.create(**options) for _ in range(8)))

    for answer in asyncio.run(ask()):
        assert answer.choices[0].message.content == choice.message.content


def test_choices_differ_and_each_is_that_of_its_seed(network_url):
    client = client_of(network_url)
    many = client.chat.completions.create(model="small", messages=ASK, max_tokens=12, seed=3, n=3)
    contents = [choice.message.content for choice in many.choices]
    alone = client.chat.completions.create(model="small", messages=ASK, max_tokens=12, seed=4)
    assert len(set(contents)) == 3 and contents[1] == alone.choices[0].message.content
    assert many.usage.completion_tokens == 36 and many.usage.prompt_tokens == alone.usage.prompt_tokens


def test_completions_take_texts_ids_and_several_of_them(network_url, text):
    client = client_of(network_url)
    ids = text.encode_prompt("def add(a, b):")
    one = client.completions.create(model="small", prompt="def add(a, b):", max_tokens=9, seed=1, echo=True)
    two = client.completions.create(model="small", prompt=[ids, ids[:3]], max_tokens=9, seed=1, logprobs=1)
    assert one.choices[0].text == "def add(a, b):" + two.choices[0].text
    assert len(two.choices) == 2 and len(two.choices[1].logprobs.token_logprobs) == 9
    pieces = client.completions.create(model="small", prompt=ids, max_tokens=9, seed=1, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == two.choices[0].text


def test_responses_are_the_same_at_once_and_in_pieces(network_url):
    client = client_of(network_url)
    options = dict(model="small", input="Hello", instructions="Be brief.", max_output_tokens=16, temperature=0)
    whole = client.responses.create(**options)
    assert whole.status == "incomplete" and whole.incomplete_details.reason == "max_output_tokens"
    assert whole.usage.output_tokens == 16
    events = list(client.responses.create(**options, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text == events[-1].response.output_text
    assert events[0].type == "response.created" and events[-1].type == "response.incomplete"


def test_tools_are_declared_called_and_answered(scripted, text):
    chat = text.chat_format

    def write(context):
        said = chat.tokenizer.decode(context)
        if "forty-two" in said:
            return chat.render_assistant("It holds forty-two.", [])
        return chat.render_assistant("I look.", CALLS) if '"name": "read"' in said else chat.render_assistant("No.", [])

    with scripted(write) as (url, engine):
        client = client_of(url)
        options = dict(model="scripted", messages=ASK, tools=[READ])
        message = client.chat.completions.create(**options)
        assert message.choices[0].finish_reason == "tool_calls" and message.choices[0].message.content == "I look."
        calls = message.choices[0].message.tool_calls
        assert [ToolCall(c.function.name, json.loads(c.function.arguments)) for c in calls] == CALLS
        answers = [{"role": "tool", "tool_call_id": call.id, "content": "forty-two"} for call in calls]
        later = client.chat.completions.create(
            model="scripted", tools=[READ], messages=[*ASK, message.choices[0].message, *answers]
        )
        assert later.choices[0].message.content == "It holds forty-two." and later.choices[0].finish_reason == "stop"
        sampled = chat.render_assistant("I look.", CALLS)
        context = engine.requests[-1].tokens
        start = len(engine.requests[0].tokens)
        assert context[start : start + len(sampled)] == sampled, "the conversation is what was sampled"

        none = client.chat.completions.create(**options, tool_choice="none")
        assert none.choices[0].message.content == "No."
        alone = client.chat.completions.create(**options, parallel_tool_calls=False)
        assert len(alone.choices[0].message.tool_calls) == 1
        with client.chat.completions.stream(**options) as stream:
            final = stream.get_final_completion()
        assert [c.function.arguments for c in final.choices[0].message.tool_calls] == [
            c.function.arguments for c in calls
        ]


def test_tools_of_responses(scripted, text):
    chat = text.chat_format

    def write(context):
        done = "forty-two" in chat.tokenizer.decode(context)
        return chat.render_assistant("It holds forty-two.", []) if done else chat.render_assistant("", CALLS)

    tools = [{"type": "function", **READ["function"]}]
    with scripted(write) as (url, _):
        client = client_of(url)
        first = client.responses.create(model="scripted", input="What is in a.py?", tools=tools)
        calls = [item for item in first.output if item.type == "function_call"]
        assert [ToolCall(call.name, json.loads(call.arguments)) for call in calls] == CALLS
        answers = [{"type": "function_call_output", "call_id": call.call_id, "output": "forty-two"} for call in calls]
        asked = [{"role": "user", "content": "What is in a.py?"}, *first.output, *answers]
        assert client.responses.create(model="scripted", input=asked, tools=tools).output_text == "It holds forty-two."
        events = list(client.responses.create(model="scripted", input="Go", tools=tools, stream=True))
        streamed = [event.item for event in events if event.type == "response.output_item.done"]
        assert [(item.name, item.arguments) for item in streamed] == [(call.name, call.arguments) for call in calls]


def test_thoughts_are_apart(scripted, text):
    ids = text.tokenizer.encode("<think>\nhm\n</think>\n\nIt is x.") + [text.chat_format.end]
    with scripted(lambda context: ids) as (url, _):
        message = client_of(url).chat.completions.create(model="scripted", messages=ASK).choices[0].message
        assert (message.reasoning_content, message.content) == ("hm", "It is x.")


def test_errors_have_the_classes_of_the_client(network_url, scripted):
    client = client_of(network_url)
    with pytest.raises(openai.NotFoundError, match="'other' is not served here; use 'small'"):
        client.chat.completions.create(model="other", messages=ASK)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="small", messages=[{"role": "user", "content": "word " * 2000}])
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="small", messages=ASK, max_tokens=100_000)
    assert caught.value.code == "context_length_exceeded" and "maximum context length is 512" in str(caught.value)
    with scripted(lambda context: [], api_keys=("right", "other")) as (url, _):
        for key in ("wrong", "r"):
            with pytest.raises(openai.AuthenticationError, match="API key is missing or wrong"):
                client_of(url, key).models.list()
        assert client_of(url, "other").models.list().data[0].max_model_len == 4096
