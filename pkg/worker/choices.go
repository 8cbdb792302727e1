package worker

import "encoding/json"

// Choices is how many sequences a server computes for a request with these fields: for each prompt of a generation the
// larger one of n and best_of, 1 where it names neither; 1024 at most. Each takes a place in the server's batch for as
// long as the call. A request of another operation counts as one: its slot is busy for all that it asks for.
func Choices(operation string, fields map[string]json.RawMessage) int {
	if !generates(operation) {
		return 1
	}
	each := min(max(1, wholeNumber(fields["n"]), wholeNumber(fields["best_of"])), choicesMax)
	return min(prompts(operation, fields)*each, choicesMax)
}

// Choices is how many sequences a server of the model computes for a call, 1 unless it speaks OpenAI's protocol.
func (m Model) Choices(call Call) int {
	if m.Protocol != ProtocolOpenAI {
		return 1
	}
	fields := m.fields(call)
	return Choices(m.operationOf(call, fields), fields)
}

// answers is how many choices the answer to a generation has: n for each of its prompts. A larger n counts as one more
// than an answer may have that is put together of a stream.
func answers(operation string, fields map[string]json.RawMessage) int {
	return prompts(operation, fields) * min(max(1, wholeNumber(fields["n"])), choicesMax+1)
}

// prompts is how many prompts a generation has: each text and each list of tokens in a list is one.
func prompts(operation string, fields map[string]json.RawMessage) int {
	if operation != OperationCompletions {
		return 1
	}
	return max(1, elements(fields["prompt"]))
}

// elements counts the texts, lists and objects that a list of JSON has, which must be valid; 0 for anything else. A
// list may have megabytes: it is not decoded.
func elements(list json.RawMessage) (n int) {
	if len(list) == 0 || list[0] != '[' {
		return 0
	}
	depth := 0
	for i := 0; i < len(list); i++ {
		c := list[i]
		if depth == 1 && (c == '[' || c == '{' || c == '"') {
			n++
		}
		switch c {
		case '[', '{':
			depth++
		case ']', '}':
			depth--
		case '"':
			for i++; i < len(list) && list[i] != '"'; i++ {
				if list[i] == '\\' {
					i++
				}
			}
		}
	}
	return n
}

// wholeNumber reads a whole number, 0 for anything else: the server refuses that.
func wholeNumber(raw json.RawMessage) (n int) {
	if !isSet(raw) || json.Unmarshal(raw, &n) != nil {
		return 0
	}
	return n
}

// CheckChoices refuses a generation whose n or best_of is no whole number, or one of more sequences than a model takes
// for one call; most is 0 where it takes any. The error is a *FieldError.
func CheckChoices(model string, most int, operation string, fields map[string]json.RawMessage) error {
	if !generates(operation) {
		return nil
	}
	each := 1
	for _, name := range []string{"n", "best_of"} {
		n := 0
		if isSet(fields[name]) && json.Unmarshal(fields[name], &n) != nil {
			return fieldError(name,
				"is not a whole number: a server might take it for one, and compute as many sequences")
		}
		if most > 0 && n > most {
			return fieldError(name, "is %d: model %s takes at most %d sequences for one call (choices_max)", n, model,
				most)
		}
		each = max(each, n)
	}
	if n := prompts(operation, fields); most > 0 && n > most/each {
		return fieldError("prompt", "is a list of %d, with %d sequences for each: model %s takes at most %d for one "+
			"call (choices_max)", n, each, model, most)
	}
	return nil
}
