package gateway

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"

	"github.com/penstock/penstock/pkg/worker"
)

// scanned is what the gateway reads of a JSON body. Spans are offsets into it; a span of length 0 is
// absent.
type scanned struct {
	model         span // the value, with its quotes
	name          string
	stream        bool
	streamOptions bool // present, and not null
	nullOptions   span // the null of stream_options
	prompt        span // messages, prompt or input: what the worker's cache is keyed by
	cacheKey      string
	tokensMax     float64
	background    json.RawMessage            // a value of that field which a response may not have
	choices       map[string]json.RawMessage // n, best_of, and prompt where that is a list
	open          int                        // offset behind the opening brace
	empty         bool                       // no members
}

type span struct{ from, to int }

func (s span) empty() bool { return s.to <= s.from }

// Errors of a body that cannot be read.
var (
	errNotJSON      = errors.New("the body is not a JSON object")
	errModelTwice   = errors.New("the body names model more than once")
	errModelText    = errors.New("model is not a text")
	errChoicesTwice = errors.New("the body names n, best_of or a list in prompt more than once")
	errModelLong    = fmt.Errorf("model has more than %d bytes", modelNameMax)
)

// modelNameMax bounds the name of a model in a request, in bytes. Those of the registry have 200 at most.
const modelNameMax = 256

// scan reads the members of the object that a body holds, in one pass over its bytes, without decoding what it
// does not need. A body that encoding/json would not take is refused.
func scan(body []byte) (scanned, error) {
	var s scanned
	i := skipSpace(body, 0)
	if i == len(body) || body[i] != '{' {
		return s, errNotJSON
	}
	i++
	s.open, s.empty = i, true
	var unfit error // the first member that is not fit: it is told only where the whole is JSON
	i, err := skipMembers(body, i, 1, func(key []byte, at span) {
		s.empty = false
		if err := s.member(key, body, at); unfit == nil {
			unfit = err
		}
	})
	if err != nil {
		return s, err
	}
	if skipSpace(body, i) != len(body) {
		return s, errNotJSON
	}
	return s, unfit
}

// member takes note of one member. The key has its quotes.
func (s *scanned) member(key, body []byte, at span) error {
	if bytes.IndexByte(key, '\\') >= 0 {
		var plain string
		if json.Unmarshal(key, &plain) != nil {
			return errNotJSON
		}
		key = strconv.AppendQuote(nil, plain)
	}
	value := body[at.from:at.to]
	switch string(key) {
	case `"model"`:
		if !s.model.empty() {
			return errModelTwice // the worker might take the other one
		}
		s.model = at
		var err error
		s.name, err = modelName(value)
		return err
	case `"stream"`:
		s.stream = string(value) == "true"
	case `"stream_options"`:
		if s.streamOptions = string(value) != "null"; !s.streamOptions {
			s.nullOptions = at
		}
	case `"messages"`, `"input"`:
		s.prompt = at
	case `"prompt"`:
		s.prompt = at
		if value[0] == '[' {
			return s.choose("prompt", value)
		}
	case `"prompt_cache_key"`:
		_ = json.Unmarshal(value, &s.cacheKey) // of another type: it is no key
	case `"background"`:
		if worker.CheckBackground(worker.OperationResponses, value) != nil {
			s.background = value
		}
	case `"n"`, `"best_of"`:
		return s.choose(string(key[1:len(key)-1]), value)
	case `"max_tokens"`, `"max_completion_tokens"`, `"max_output_tokens"`:
		if n, err := strconv.ParseFloat(string(value), 64); err == nil {
			s.tokensMax = n
		}
	}
	return nil
}

// modelName reads the name of a model. One that may be too long is not decoded: it may have megabytes.
func modelName(value []byte) (name string, err error) {
	const escape = len(`\u0000`) // the longest form of a byte
	switch {
	case value[0] != '"':
		return "", errModelText
	case len(value) > modelNameMax*escape+len(`""`):
		return "", errModelLong
	case json.Unmarshal(value, &name) != nil:
		return "", errModelText
	case len(name) > modelNameMax:
		return "", errModelLong
	}
	return name, nil
}

// choose takes note of a field by which a worker computes more than one sequence.
func (s *scanned) choose(name string, value json.RawMessage) error {
	if _, twice := s.choices[name]; twice {
		return errChoicesTwice // the worker might take the other one
	}
	if s.choices == nil {
		s.choices = make(map[string]json.RawMessage, 1)
	}
	s.choices[name] = value
	return nil
}

// usageOption asks for the token counts at the end of a stream.
const (
	usageValue  = `{"include_usage":true}`
	usageOption = `"stream_options":` + usageValue
)

// rewrite returns the body with the model's remote name in place of its own and, if addUsage is set, with
// the option that asks for token counts. Everything else stays byte for byte. The parts share the
// body's memory.
func (s *scanned) rewrite(body []byte, remote string, addUsage bool) [][]byte {
	type edit struct {
		span
		text []byte
	}
	edits := make([]edit, 0, 2)
	switch {
	case !addUsage:
	case !s.nullOptions.empty(): // of two members with a name the last one holds
		edits = append(edits, edit{s.nullOptions, []byte(usageValue)})
	case s.empty:
		edits = append(edits, edit{span{s.open, s.open}, []byte(usageOption)})
	default:
		edits = append(edits, edit{span{s.open, s.open}, []byte(usageOption + ",")})
	}
	if !s.model.empty() && remote != s.name {
		if quoted, err := json.Marshal(remote); err == nil { // a text always has a form in JSON
			edits = append(edits, edit{s.model, quoted})
		}
	}
	if len(edits) == 2 && edits[0].from > edits[1].from {
		edits[0], edits[1] = edits[1], edits[0]
	}
	parts, from := make([][]byte, 0, 2*len(edits)+1), 0
	for _, e := range edits {
		parts = append(parts, body[from:e.from], e.text)
		from = e.to
	}
	return append(parts, body[from:])
}

func size(parts [][]byte) (n int64) {
	for _, p := range parts {
		n += int64(len(p))
	}
	return n
}
