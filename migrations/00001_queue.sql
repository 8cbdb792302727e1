-- +goose Up
CREATE SCHEMA penstock;
