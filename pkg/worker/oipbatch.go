package worker

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"
)

// A batch of the Open Inference Protocol is one request whose tensors are
// stacked along their first dimension.

// tensor is an input or output. Its data may be flat or nested; it is kept flat.
type tensor struct {
	Name       string          `json:"name"`
	Shape      []int64         `json:"shape"`
	Datatype   string          `json:"datatype"`
	Parameters json.RawMessage `json:"parameters,omitempty"`
	Data       json.RawMessage `json:"data"`
}

// inferRequest keeps what it does not know of a payload out of batches: an
// output selection or parameters may differ from entry to entry.
type inferRequest struct {
	ID         json.RawMessage `json:"id,omitempty"`
	Parameters json.RawMessage `json:"parameters,omitempty"`
	Inputs     []tensor        `json:"inputs"`
	Outputs    json.RawMessage `json:"outputs,omitempty"`
}

func (p *oip) request(call Call) (inferRequest, int64, error) {
	var r inferRequest
	if err := json.Unmarshal(call.Payload, &r); err != nil || len(r.Inputs) == 0 {
		return r, 0, errors.New("payload has no inputs")
	}
	rows := int64(0)
	for _, t := range r.Inputs {
		if len(t.Shape) == 0 || t.Shape[0] <= 0 || (rows != 0 && t.Shape[0] != rows) {
			return r, 0, fmt.Errorf("input %s has no first dimension in common with the others, so it cannot "+
				"be stacked", t.Name)
		}
		rows = t.Shape[0]
	}
	return r, rows, nil
}

func (p *oip) Measure(call Call, at time.Time) (Member, error) {
	r, rows, err := p.request(call)
	if err != nil {
		return Member{}, err
	}
	var shape strings.Builder
	for _, t := range r.Inputs {
		fmt.Fprintf(&shape, "%q%s%v%s;", t.Name, t.Datatype, t.Shape[1:], t.Parameters)
	}
	fmt.Fprintf(&shape, "%s%s", r.Outputs, r.Parameters)
	return p.measure(call, at, shape.String(), rows), nil
}

func (p *oip) Join(calls []Call) (Call, error) {
	var whole inferRequest
	data := map[string][]json.RawMessage{}
	total := int64(0)
	for _, c := range calls {
		r, rows, err := p.request(c)
		if err != nil {
			return Call{}, fmt.Errorf("join entry %s: %w", c.Entry, err)
		}
		whole.Inputs, whole.Outputs, whole.Parameters = r.Inputs, r.Outputs, r.Parameters
		total += rows
		for _, t := range r.Inputs {
			flat, err := flatten(t.Data, len(t.Shape), volume(t.Shape))
			if err != nil || int64(len(flat)) != volume(t.Shape) {
				return Call{}, fmt.Errorf("join entry %s: data of input %s does not fill its shape", c.Entry, t.Name)
			}
			data[t.Name] = append(data[t.Name], flat...)
		}
	}
	for i, t := range whole.Inputs {
		stacked, err := json.Marshal(data[t.Name])
		if err != nil {
			return Call{}, fmt.Errorf("join batch: %w", err)
		}
		whole.Inputs[i].Shape = append([]int64{total}, t.Shape[1:]...)
		whole.Inputs[i].Data = stacked
	}
	payload, err := json.Marshal(whole)
	if err != nil {
		return Call{}, fmt.Errorf("join batch: %w", err)
	}
	return joined(calls, payload), nil
}

func (p *oip) Split(calls []Call, whole Outcome) []Outcome {
	if whole.Kind != Done {
		return SameForAll(calls, whole)
	}
	var reply map[string]json.RawMessage
	var outputs []tensor
	if json.Unmarshal(whole.Result, &reply) != nil || json.Unmarshal(reply["outputs"], &outputs) != nil {
		return misfit(calls, whole, "worker answered a batch without outputs")
	}
	rows, total := make([]int64, len(calls)), int64(0)
	ids := make([]json.RawMessage, len(calls))
	for i, c := range calls {
		r, n, err := p.request(c)
		if err != nil {
			return misfit(calls, whole, err.Error())
		}
		rows[i], total = n, total+n
		ids[i] = requestID(r.ID, c)
	}
	flat := make([][]json.RawMessage, len(outputs))
	for i, t := range outputs {
		values, err := flatten(t.Data, len(t.Shape), volume(t.Shape))
		if err != nil || len(t.Shape) == 0 || t.Shape[0] != total || int64(len(values)) != volume(t.Shape) {
			return misfit(calls, whole,
				fmt.Sprintf("output %s has shape %v for a batch of %d rows", t.Name, t.Shape, total))
		}
		flat[i] = values
	}
	outcomes, first := make([]Outcome, len(calls)), int64(0)
	for i := range calls {
		result, err := cut(reply, outputs, flat, ids[i], first, rows[i], total)
		if err != nil {
			return misfit(calls, whole, err.Error())
		}
		outcomes[i] = Outcome{Kind: Done, Result: result, StatusCode: whole.StatusCode, SentAt: whole.SentAt}
		first += rows[i]
	}
	return outcomes
}

// cut takes n of the total rows of every output, from first on, under the id of their own request.
func cut(reply map[string]json.RawMessage, outputs []tensor, flat [][]json.RawMessage, id json.RawMessage, first, n,
	total int64,
) (json.RawMessage, error) {
	own := make([]tensor, len(outputs))
	for i, t := range outputs {
		stride := int64(len(flat[i])) / total
		data, err := json.Marshal(flat[i][first*stride : (first+n)*stride])
		if err != nil {
			return nil, err
		}
		own[i] = t
		own[i].Shape, own[i].Data = append([]int64{n}, t.Shape[1:]...), data
	}
	list, err := json.Marshal(own)
	if err != nil {
		return nil, err
	}
	answer := map[string]json.RawMessage{}
	for name, member := range reply {
		answer[name] = member
	}
	answer["outputs"], answer["id"] = list, id
	return json.Marshal(answer)
}

// flatten returns the values of a nested list in row-major order, most at most, in one pass. The list
// may be nested as deep as the tensor has dimensions: a deeper one cannot be its data.
func flatten(data json.RawMessage, dimensions int, most int64) ([]json.RawMessage, error) {
	var values []json.RawMessage
	depth, start := 0, -1
	inText := false
	end := func(at int) {
		if start >= 0 {
			values, start = append(values, data[start:at]), -1
		}
	}
	for i := 0; i < len(data); i++ {
		switch c := data[i]; {
		case inText && c == '\\':
			i++
		case inText:
			inText = c != '"'
		case c == '[':
			if depth++; depth > max(dimensions, 1) {
				return nil, fmt.Errorf("data is nested deeper than its %d dimensions", dimensions)
			}
		case c == ']':
			end(i)
			depth--
		case c == ',' || c == ' ' || c == '\t' || c == '\n' || c == '\r':
			end(i)
		case c == '{' || depth == 0:
			return nil, errors.New("data is not a list of values")
		default:
			if start < 0 {
				start = i
			}
			inText = c == '"'
		}
		if int64(len(values)) > most {
			return nil, fmt.Errorf("data has more than the %d values of its shape", most)
		}
	}
	return values, nil
}

func volume(shape []int64) int64 {
	v := int64(1)
	for _, n := range shape {
		if n < 0 || (n > 0 && v > (1<<31)/n) {
			return -1
		}
		v *= n
	}
	return v
}
