package worker

import (
	"bytes"
	"encoding/json"
	"strings"
)

// A body template is a JSON document whose string values may be placeholders:
//
//	"$payload"         the entry's payload
//	"$payload.a.b"     a field of it; absent fields drop the member that names them
//	"$entry"           the entry id
//	"$attempt"         the attempt, a number
//	"$remaining_ms"    milliseconds left, a number; absent without a deadline
//	"$remote_name"     the model's name at the server
//
// A value is replaced as a whole, so no payload can break out of its place. A
// string that should begin with a dollar sign is written with two.

// expand fills in the template. values holds the placeholders' JSON by name,
// without the dollar sign.
func expand(template json.RawMessage, values map[string]json.RawMessage) (json.RawMessage, error) {
	var document any
	if err := decodeNumbers(template, &document); err != nil {
		return nil, err
	}
	document, _ = fill(document, values)
	return json.Marshal(document)
}

func fill(node any, values map[string]json.RawMessage) (any, bool) {
	switch node := node.(type) {
	case map[string]any:
		for name, member := range node {
			if filled, ok := fill(member, values); ok {
				node[name] = filled
			} else {
				delete(node, name)
			}
		}
		return node, true
	case []any:
		for i, item := range node {
			node[i], _ = fill(item, values)
		}
		return node, true
	case string:
		return fillText(node, values)
	default:
		return node, true
	}
}

func fillText(text string, values map[string]json.RawMessage) (any, bool) {
	name, found := strings.CutPrefix(text, "$")
	if !found {
		return text, true
	}
	if strings.HasPrefix(name, "$") {
		return name, true
	}
	if path, isField := strings.CutPrefix(name, "payload."); isField {
		raw, ok := lookup(values["payload"], path)
		return raw, ok
	}
	raw, ok := values[name]
	return raw, ok && raw != nil
}

func checkTemplate(template json.RawMessage) error {
	var document any
	if err := decodeNumbers(template, &document); err != nil {
		return fieldError("body", "is not JSON: %v", err)
	}
	if _, isObject := document.(map[string]any); !isObject && document != "$payload" {
		return fieldError("body", "must be an object or \"$payload\"")
	}
	return checkPlaceholders(document)
}

func checkPlaceholders(node any) error {
	switch node := node.(type) {
	case map[string]any:
		for _, member := range node {
			if err := checkPlaceholders(member); err != nil {
				return err
			}
		}
	case []any:
		for _, item := range node {
			if err := checkPlaceholders(item); err != nil {
				return err
			}
		}
	case string:
		name, found := strings.CutPrefix(node, "$")
		if !found || strings.HasPrefix(name, "$") || strings.HasPrefix(name, "payload.") {
			return nil
		}
		switch name {
		case "payload", "entry", "attempt", "remaining_ms", "remote_name":
		default:
			return fieldError("body", "has an unknown placeholder %q", node)
		}
	}
	return nil
}

// decodeNumbers decodes without turning large integers into floats.
func decodeNumbers(data []byte, into any) error {
	decoder := json.NewDecoder(bytes.NewReader(data))
	decoder.UseNumber()
	return decoder.Decode(into)
}

// TextField returns a field of a JSON document by its dotted path, a text without its quotes; empty
// if it is absent.
func TextField(document json.RawMessage, path string) string {
	value, _ := lookup(document, path)
	return textOf(value)
}

// lookup descends into an object by a dotted path.
func lookup(document json.RawMessage, path string) (json.RawMessage, bool) {
	for name := range strings.SplitSeq(path, ".") {
		var object map[string]json.RawMessage
		if json.Unmarshal(document, &object) != nil {
			return nil, false
		}
		member, ok := object[name]
		if !ok {
			return nil, false
		}
		document = member
	}
	return document, true
}
