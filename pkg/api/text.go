package api

import (
	"errors"
	"reflect"
	"strings"
	"unicode/utf8"
)

var (
	errNUL  = errors.New("it has a NUL character, which texts cannot store")
	errUTF8 = errors.New("it is not UTF-8")
)

// storable refuses texts that the database cannot store, before one of them reaches it: its own error would
// name neither the field nor the remedy.
func storable(field, text string) error {
	switch {
	case strings.ContainsRune(text, 0):
		return flaw(field, errNUL)
	case !utf8.ValidString(text):
		return flaw(field, errUTF8)
	}
	return nil
}

// storableInput checks every text of the input of a route, by the names that requests give them.
func storableInput(in any) error { return checkTexts("", reflect.ValueOf(in)) }

func checkTexts(field string, v reflect.Value) error {
	switch v.Kind() {
	case reflect.String:
		return storable(field, v.String())
	case reflect.Pointer, reflect.Interface:
		if !v.IsNil() {
			return checkTexts(field, v.Elem())
		}
	case reflect.Slice, reflect.Array:
		if v.Type().Elem().Kind() == reflect.Uint8 {
			return nil
		}
		for i := range v.Len() {
			if err := checkTexts(field, v.Index(i)); err != nil {
				return err
			}
		}
	case reflect.Map:
		for members := v.MapRange(); members.Next(); {
			name := members.Key().String()
			if err := storable(field, name); err != nil {
				return err
			}
			if err := checkTexts(name, members.Value()); err != nil {
				return err
			}
		}
	case reflect.Struct:
		for i := range v.NumField() {
			if t := v.Type().Field(i); t.IsExported() {
				if err := checkTexts(fieldName(t), v.Field(i)); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// fieldName is the name of a field in requests.
func fieldName(f reflect.StructField) string {
	for _, tag := range []string{"json", "query", "path", "header"} {
		if name, _, _ := strings.Cut(f.Tag.Get(tag), ","); name != "" && name != "-" {
			return name
		}
	}
	return strings.ToLower(f.Name)
}
