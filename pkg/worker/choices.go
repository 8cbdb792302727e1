package worker

import "encoding/json"

// Choices is how many sequences a server computes for a generation: the larger one of n and best_of of its payload, 1
// where it names neither, 1024 at most. Each takes a place in the server's batch for as long as the call.
func Choices(payload json.RawMessage) int {
	var asked struct {
		N      json.RawMessage `json:"n"`
		BestOf json.RawMessage `json:"best_of"`
	}
	if json.Unmarshal(payload, &asked) != nil {
		return 1
	}
	return min(max(1, wholeNumber(asked.N), wholeNumber(asked.BestOf)), choicesMost)
}

// wholeNumber reads a whole number, 0 for anything else: the server refuses that.
func wholeNumber(raw json.RawMessage) (n int) {
	if !isSet(raw) || json.Unmarshal(raw, &n) != nil {
		return 0
	}
	return n
}

// checkChoices refuses a generation of more sequences than the model takes for one call.
func (m Model) checkChoices(fields map[string]json.RawMessage) error {
	for _, name := range []string{"n", "best_of"} {
		if err := CheckChoices(m.Name, m.ChoicesMax, name, fields[name]); err != nil {
			return err
		}
	}
	return nil
}

// CheckChoices refuses a value of the field n or best_of of a generation that is no whole number, or more than a model
// takes for one call; most is 0 where it takes any. The error is a *FieldError.
func CheckChoices(model string, most int, field string, value json.RawMessage) error {
	n := 0
	if isSet(value) && json.Unmarshal(value, &n) != nil {
		return fieldError(field,
			"is not a whole number: a server might take it for one, and compute as many sequences")
	}
	if most > 0 && n > most {
		return fieldError(field, "is %d: model %s takes at most %d sequences for one call (choices_max)", n, model,
			most)
	}
	return nil
}

// Generates says whether an operation computes as many sequences as its payload asks for.
func Generates(operation string) bool { return generates(operation) }
